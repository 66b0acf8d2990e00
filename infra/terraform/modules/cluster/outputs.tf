output "name" {
  description = "Name of the cluster, known once it is there."
  value       = aws_eks_cluster.this.name
}

output "security_group_id" {
  description = "The group of all nodes and pods of the cluster."
  value       = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
}

output "node_role_arn" {
  description = "Role of all nodes: pull images, join the cluster."
  value       = aws_iam_role.node.arn

  # nodes that come up before their policies are attached cannot join
  depends_on = [aws_iam_role_policy_attachment.node]
}

output "oidc_provider_arn" {
  description = "The provider that roles of service accounts trust."
  value       = aws_iam_openid_connect_provider.this.arn
}

output "oidc_issuer" {
  description = "Its URL without the scheme."
  value       = trimprefix(aws_eks_cluster.this.identity[0].oidc[0].issuer, "https://")
}

output "autoscaler_policy_json" {
  description = "What the cluster autoscaler may do."
  value       = data.aws_iam_policy_document.autoscaler.json
}
