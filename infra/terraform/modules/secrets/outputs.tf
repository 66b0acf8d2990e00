output "names" {
  description = "Names of the secrets by what they hold."
  value       = { for what, secret in aws_secretsmanager_secret.this : what => secret.name }
}

output "read_policy_json" {
  description = "What External Secrets may do with them."
  value       = data.aws_iam_policy_document.read.json
}
