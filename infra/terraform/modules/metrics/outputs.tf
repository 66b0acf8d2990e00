output "write_endpoint" {
  description = "Where Prometheus writes to."
  value       = "${aws_prometheus_workspace.this.prometheus_endpoint}api/v1/remote_write"
}

output "write_policy_json" {
  description = "What the Prometheus in the cluster may do."
  value       = data.aws_iam_policy_document.write.json
}

output "grafana_url" {
  description = "The Grafana workspace, or null."
  value       = var.grafana ? "https://${aws_grafana_workspace.this[0].endpoint}" : null
}
