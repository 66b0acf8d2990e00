output "cluster_name" {
  description = "For `aws eks update-kubeconfig --name`."
  value       = module.cluster.name
}

output "broker_url" {
  description = "What `redis.url` is, without the user and the password, which come from the secrets."
  value       = "rediss://${module.broker.host}:${module.broker.port}/0"
}

output "image_repositories" {
  description = "Where the images go, by name."
  value       = module.registry.urls
}

output "weights_bucket" {
  description = "The bucket for models' weights."
  value       = module.weights.bucket
}

output "service_account_roles" {
  description = "The role of each service account, for its annotation `eks.amazonaws.com/role-arn`."
  value       = { for name, identity in module.identity : name => identity.role_arn }
}

output "secret_names" {
  description = "The secrets that are made empty here and filled by hand, by what they hold."
  value       = module.secrets.names
}

output "metrics_endpoint" {
  description = "Where Prometheus writes to."
  value       = module.metrics.write_endpoint
}

output "gpu_classes" {
  description = "The values of the node label `headrace/gpu-class` that models may ask for."
  value       = sort(keys(var.gpu_nodes))
}
