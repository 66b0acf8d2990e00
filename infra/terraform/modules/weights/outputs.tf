output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.bucket
}

output "read_policy_json" {
  description = "What a worker may do with it."
  value       = data.aws_iam_policy_document.read.json
}
