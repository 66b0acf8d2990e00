# One role a service account, each with what that one needs and nothing else.

locals {
  service_accounts = {
    worker = {
      namespace = var.namespace
      account   = "headrace-worker"
      policy    = module.weights.read_policy_json
    }
    external-secrets = {
      namespace = "external-secrets"
      account   = "external-secrets"
      policy    = module.secrets.read_policy_json
    }
    prometheus = {
      namespace = "monitoring"
      account   = "prometheus"
      policy    = module.metrics.write_policy_json
    }
    cluster-autoscaler = {
      namespace = "kube-system"
      account   = "cluster-autoscaler"
      policy    = module.cluster.autoscaler_policy_json
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
  policy_json       = each.value.policy
}
