output "role_arn" {
  description = "ARN of the role."
  value       = aws_iam_role.this.arn
}
