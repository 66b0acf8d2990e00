# MemoryDB: Valkey whose writes are in a log over several zones before they are acknowledged, so a failover loses nothing
# that was. ElastiCache, with the same protocol, replicates after the answer and evicts by default: see the README.

locals {
  # Who may do what, as `headrace redis-acl --form rules` prints it: a test holds the file and the code together.
  rules                = jsondecode(file("${path.module}/rules.json"))
  acl_name             = var.existing_acl == null ? aws_memorydb_acl.this[0].name : var.existing_acl
  parameter_group_name = var.existing_parameter_group == null ? aws_memorydb_parameter_group.this[0].name : var.existing_parameter_group
}

resource "aws_security_group" "this" {
  name_prefix = "${var.name}-broker-"
  description = "The broker's port, from the cluster's pods only"
  vpc_id      = var.vpc_id

  tags = { Name = "${var.name}-broker" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  security_group_id            = aws_security_group.this.id
  referenced_security_group_id = var.client_security_group_id
  description                  = "Pods and workers"
  ip_protocol                  = "tcp"
  from_port                    = var.port
  to_port                      = var.port
}

resource "aws_memorydb_subnet_group" "this" {
  name       = var.name
  subnet_ids = var.subnet_ids
}

resource "aws_memorydb_parameter_group" "this" {
  count = var.existing_parameter_group == null ? 1 : 0

  name        = "${var.name}-${var.parameter_group_family == "memorydb_valkey7" ? "valkey7" : "broker"}"
  family      = var.parameter_group_family
  description = "No eviction: every key has a TTL, so any other policy evicts logs that are being read"

  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
}

resource "aws_memorydb_user" "this" {
  for_each = var.existing_acl == null ? local.rules : {}

  user_name     = "${var.name}-${each.key}"
  access_string = each.value

  authentication_mode {
    type      = "password"
    passwords = lookup(var.passwords, each.key, [])
  }

  lifecycle {
    precondition {
      condition     = contains(keys(var.passwords), each.key)
      error_message = "broker_passwords must have one for each of ${join(", ", keys(local.rules))}."
    }
  }
}

resource "aws_memorydb_acl" "this" {
  count = var.existing_acl == null ? 1 : 0

  name       = var.name
  user_names = [for user in aws_memorydb_user.this : user.user_name]
}

resource "aws_memorydb_cluster" "this" {
  name                       = var.name
  engine                     = "valkey"
  engine_version             = var.engine_version
  node_type                  = var.node_type
  num_shards                 = var.shards
  num_replicas_per_shard     = var.replicas_per_shard
  acl_name                   = local.acl_name
  parameter_group_name       = local.parameter_group_name
  subnet_group_name          = aws_memorydb_subnet_group.this.name
  security_group_ids         = [aws_security_group.this.id]
  port                       = var.port
  tls_enabled                = true
  kms_key_arn                = var.kms_key_arn
  snapshot_retention_limit   = var.snapshot_days
  snapshot_window            = "03:00-04:00"
  maintenance_window         = "sun:04:30-sun:05:30"
  auto_minor_version_upgrade = true
  final_snapshot_name        = var.take_final_snapshot ? "${var.name}-final" : null
}
