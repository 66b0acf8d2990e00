output "name" {
  description = "Name of the node group."
  value       = aws_eks_node_group.this.node_group_name
}
