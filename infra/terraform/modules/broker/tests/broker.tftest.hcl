# Parameter groups and ACLs, which no simulated AWS has.

mock_provider "aws" {}

variables {
  name                     = "headrace"
  vpc_id                   = "vpc-1"
  subnet_ids               = ["subnet-1", "subnet-2", "subnet-3"]
  client_security_group_id = "sg-1"
  node_type                = "db.r7g.large"
  engine_version           = "7.3"
  kms_key_arn              = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  passwords = {
    gateway = ["gateway-password-0123456789abcdef-0123", "its-successor-0123456789abcdef-0123456"]
    worker  = ["worker-password-0123456789abcdef-01234"]
    scaler  = ["scaler-password-0123456789abcdef-01234"]
    loader  = ["loader-password-0123456789abcdef-01234"]
    ops     = ["ops-password-0123456789abcdef-01234567"]
  }
}

run "nothing_is_evicted" {
  command = plan

  assert {
    condition     = one(aws_memorydb_parameter_group.this[0].parameter).name == "maxmemory-policy" && one(aws_memorydb_parameter_group.this[0].parameter).value == "noeviction"
    error_message = "maxmemory-policy must be noeviction"
  }

  assert {
    condition     = aws_memorydb_cluster.this.parameter_group_name == aws_memorydb_parameter_group.this[0].name
    error_message = "the cluster must use the parameter group"
  }
}

run "durable_and_closed" {
  command = plan

  assert {
    condition     = aws_memorydb_cluster.this.tls_enabled && aws_memorydb_cluster.this.engine == "valkey"
    error_message = "the cluster must be Valkey over TLS"
  }

  assert {
    condition     = aws_memorydb_cluster.this.num_replicas_per_shard >= 1
    error_message = "the cluster must survive a zone"
  }

  assert {
    condition     = aws_memorydb_cluster.this.acl_name == aws_memorydb_acl.this[0].name
    error_message = "the cluster must use the ACL"
  }

  assert {
    condition     = toset(aws_memorydb_acl.this[0].user_names) == toset([for user in ["gateway", "worker", "scaler", "loader", "ops"] : "headrace-${user}"])
    error_message = "the ACL must hold our users and no other"
  }

  assert {
    condition     = alltrue([for user in aws_memorydb_user.this : !strcontains(user.access_string, "+@") && !strcontains(user.access_string, "+eval") && !strcontains(user.access_string, "~* ") && !strcontains(user.access_string, "nopass")])
    error_message = "no user may do everything, or reach every key"
  }

  assert {
    condition     = length(one(aws_memorydb_user.this["gateway"].authentication_mode).passwords) == 2
    error_message = "a user must be able to have two passwords, for a rotation without a pause"
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.clients.referenced_security_group_id == "sg-1"
    error_message = "only the cluster's pods may reach the broker"
  }
}

run "existing_groups_are_used" {
  command = plan

  variables {
    existing_acl             = "theirs"
    existing_parameter_group = "theirs-too"
  }

  assert {
    condition     = length(aws_memorydb_user.this) == 0 && length(aws_memorydb_acl.this) == 0 && length(aws_memorydb_parameter_group.this) == 0
    error_message = "nothing may be made beside what exists"
  }

  assert {
    condition     = aws_memorydb_cluster.this.acl_name == "theirs" && aws_memorydb_cluster.this.parameter_group_name == "theirs-too"
    error_message = "what exists must be used"
  }
}

run "one_zone_is_refused" {
  command = plan

  variables {
    subnet_ids = ["subnet-1"]
  }

  expect_failures = [var.subnet_ids]
}

run "each_user_needs_a_password" {
  command = plan

  variables {
    passwords = { gateway = ["gateway-password-0123456789abcdef-0123"] }
  }

  expect_failures = [aws_memorydb_user.this]
}
