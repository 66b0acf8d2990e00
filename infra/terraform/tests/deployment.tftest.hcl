# The whole region against a provider that only knows the schema: what a simulated AWS lacks is checked here.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
  }

  mock_data "aws_region" {
    defaults = { name = "eu-central-1" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555" }
  }

  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/mock" }
  }

  mock_resource "aws_cloudwatch_log_group" {
    defaults = { arn = "arn:aws:logs:eu-central-1:123456789012:log-group:/mock" }
  }

  mock_resource "aws_iam_openid_connect_provider" {
    defaults = { arn = "arn:aws:iam::123456789012:oidc-provider/mock" }
  }

  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }

  mock_resource "aws_memorydb_cluster" {
    defaults = { cluster_endpoint = [{ address = "broker.example", port = 6379 }] }
  }

  mock_resource "aws_eks_cluster" {
    defaults = { identity = [{ oidc = [{ issuer = "https://oidc.example/id/ABC" }] }] }
  }
}

variables {
  broker_passwords = {
    gateway = ["gateway-password-0123456789abcdef-0123"]
    worker  = ["worker-password-0123456789abcdef-01234"]
    scaler  = ["scaler-password-0123456789abcdef-01234"]
    loader  = ["loader-password-0123456789abcdef-01234"]
    ops     = ["ops-password-0123456789abcdef-01234567"]
  }
}

run "defaults" {
  command = apply

  assert {
    condition     = output.gpu_classes == tolist(["l4", "l4-batch"])
    error_message = "the classes of GPU nodes are not told"
  }

  assert {
    condition     = output.broker_url == "rediss://broker.example:6379/0"
    error_message = "the broker is reached over TLS"
  }

  assert {
    condition     = length(module.identity) == 5
    error_message = "each service account needs its role"
  }

  assert {
    condition     = toset([for addon in aws_eks_addon.storage : addon.addon_name]) == toset(["aws-ebs-csi-driver", "aws-mountpoint-s3-csi-driver"])
    error_message = "disks and weights need their drivers"
  }
}

run "wrong_values_are_refused" {
  command = plan

  variables {
    broker_passwords   = { gateway = ["short"] }
    broker             = { acl_name = "open-access" }
    zones              = ["eu-central-1a", "eu-central-1b", "eu-central-1b"]
    api_access_cidrs   = ["0.0.0.0/0"]
    cpu_nodes          = { min = 1 }
    gpu_nodes          = { l4 = { instance_types = [], max = 1 } }
    kubernetes_version = "1.24"
    storage_addons     = { "my-driver" = null }
    vpc_cidr           = "10.0.0.0/24"
    log_days           = 2
    name               = "Headrace"
    region             = "Frankfurt"
    admin_role_arns    = ["me"]
  }

  expect_failures = [
    var.broker_passwords,
    var.broker,
    var.zones,
    var.api_access_cidrs,
    var.cpu_nodes,
    var.gpu_nodes,
    var.kubernetes_version,
    var.storage_addons,
    var.vpc_cidr,
    var.log_days,
    var.name,
    var.region,
    var.admin_role_arns,
  ]
}

run "a_broker_without_a_replica_is_refused" {
  command = plan

  variables {
    broker = { replicas_per_shard = 0 }
  }

  expect_failures = [var.broker]
}
