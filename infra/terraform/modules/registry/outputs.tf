output "urls" {
  description = "Repository URLs by the last part of their name."
  value       = { for name, repository in aws_ecr_repository.this : reverse(split("/", name))[0] => repository.repository_url }
}
