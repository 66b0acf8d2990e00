output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "private_subnet_ids" {
  description = "Subnets for nodes and pods, in the order of the zones."
  value       = [for zone in var.zones : aws_subnet.private[zone].id]
}

output "private_subnet_ids_by_zone" {
  description = "The same by zone."
  value       = { for zone, subnet in aws_subnet.private : zone => subnet.id }
}

output "public_subnet_ids" {
  description = "Subnets for load balancers."
  value       = [for zone in var.zones : aws_subnet.public[zone].id]
}

output "data_subnet_ids" {
  description = "Subnets for the broker; nothing leads out of them."
  value       = [for zone in var.zones : aws_subnet.data[zone].id]
}

output "s3_endpoint_id" {
  description = "The gateway endpoint through which nodes reach S3."
  value       = aws_vpc_endpoint.s3.id
}
