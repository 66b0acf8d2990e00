variable "name" {
  description = "Name of the deployment."
  type        = string
}

variable "grafana" {
  description = "Also make a Grafana workspace."
  type        = bool
  default     = false
}

variable "log_days" {
  description = "How long Prometheus's own log is kept."
  type        = number
}

variable "kms_key_arn" {
  description = "Key for that log."
  type        = string
}
