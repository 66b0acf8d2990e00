variable "name" {
  description = "Name of the deployment."
  type        = string
}

variable "kms_key_arn" {
  description = "Key for the objects."
  type        = string
}

variable "vpc_endpoint_id" {
  description = "The only way by which workers read."
  type        = string
}

variable "force_destroy" {
  description = "Destroy the bucket with what is in it."
  type        = bool
  default     = false
}
