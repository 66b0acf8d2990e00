# One role a service account, each with what that one needs and nothing else.

locals {
  service_accounts = {
    # mounts the bucket of weights for the workers, which have no rights of their own
    s3-csi = {
      namespace = "kube-system"
      account   = "s3-csi-driver-sa"
      policies  = { only = module.weights.read_policy_json }
    }
    ebs-csi = {
      namespace = "kube-system"
      account   = "ebs-csi-controller-sa"
      managed   = ["service-role/AmazonEBSCSIDriverPolicy"]
    }
    external-secrets = {
      namespace = "external-secrets"
      account   = "external-secrets"
      policies  = { only = module.secrets.read_policy_json }
    }
    prometheus = {
      namespace = "monitoring"
      account   = "prometheus"
      policies  = { only = module.metrics.write_policy_json }
    }
    cluster-autoscaler = {
      namespace = "kube-system"
      account   = "cluster-autoscaler"
      policies  = { only = module.cluster.autoscaler_policy_json }
    }
  }
}

module "identity" {
  source   = "./modules/identity"
  for_each = local.service_accounts

  name              = "${var.name}-${each.key}"
  namespace         = each.value.namespace
  service_account   = each.value.account
  oidc_provider_arn = module.cluster.oidc_provider_arn
  oidc_issuer       = module.cluster.oidc_issuer
  policies          = lookup(each.value, "policies", {})
  managed_policies  = lookup(each.value, "managed", [])
}

locals {
  storage_accounts = { "aws-ebs-csi-driver" = "ebs-csi", "aws-mountpoint-s3-csi-driver" = "s3-csi" }
}

# The add-ons that act on AWS: each by a role of its own, so they come after the identities.
resource "aws_eks_addon" "storage" {
  for_each = var.storage_addons

  cluster_name                = module.cluster.name
  addon_name                  = each.key
  addon_version               = each.value
  service_account_role_arn    = module.identity[local.storage_accounts[each.key]].role_arn
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "PRESERVE"
}
