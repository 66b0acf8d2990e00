output "host" {
  description = "The cluster's endpoint."
  value       = aws_memorydb_cluster.this.cluster_endpoint[0].address
}

output "port" {
  description = "Its port."
  value       = aws_memorydb_cluster.this.cluster_endpoint[0].port
}
