# Add-ons and access entries, which no simulated AWS has.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  name               = "headrace"
  kubernetes_version = "1.33"
  subnet_ids         = ["subnet-1", "subnet-2", "subnet-3"]
  addons             = { "vpc-cni" = null, "coredns" = "v1.12.0-eksbuild.1" }
  admin_role_arns    = ["arn:aws:iam::123456789012:role/admin"]
  kms_key_arn        = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  log_days           = 30
}

run "addons" {
  command = plan

  assert {
    condition     = toset(keys(aws_eks_addon.this)) == toset(["coredns", "vpc-cni"]) && aws_eks_addon.this["coredns"].addon_version == "v1.12.0-eksbuild.1"
    error_message = "each add-on must be there, in the version that is asked for"
  }

  assert {
    condition     = jsondecode(aws_eks_addon.this["vpc-cni"].configuration_values).enableNetworkPolicy == "true"
    error_message = "the CNI must enforce network policies"
  }
}

run "the_api_is_private_and_has_no_config_map_users" {
  command = plan

  assert {
    condition     = !aws_eks_cluster.this.vpc_config[0].endpoint_public_access && aws_eks_cluster.this.vpc_config[0].endpoint_private_access
    error_message = "without ranges that may reach it, the API must be private"
  }

  assert {
    condition     = aws_eks_cluster.this.access_config[0].authentication_mode == "API"
    error_message = "who may enter is said by access entries only"
  }

  assert {
    condition     = toset(aws_eks_cluster.this.encryption_config[0].resources) == toset(["secrets"])
    error_message = "secrets must be encrypted"
  }

  assert {
    condition     = aws_eks_access_policy_association.admin["arn:aws:iam::123456789012:role/admin"].access_scope[0].type == "cluster"
    error_message = "the administrator's role must have its entry"
  }
}

run "a_public_api_is_for_the_ranges_that_are_named" {
  command = plan

  variables {
    api_access_cidrs = ["192.0.2.0/24"]
  }

  assert {
    condition     = toset(aws_eks_cluster.this.vpc_config[0].public_access_cidrs) == toset(["192.0.2.0/24"])
    error_message = "the API must be open to the named ranges only"
  }
}
