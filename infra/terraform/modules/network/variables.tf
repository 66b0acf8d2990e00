variable "name" {
  description = "Name of the deployment."
  type        = string
}

variable "cidr" {
  description = "Address range of the VPC."
  type        = string
}

variable "zones" {
  description = "Three availability zones."
  type        = list(string)

  validation {
    condition     = length(distinct(var.zones)) == 3
    error_message = "zones must name three different availability zones."
  }
}

variable "single_nat_gateway" {
  description = "One NAT gateway for all zones."
  type        = bool
  default     = false
}

variable "log_days" {
  description = "How long refused connections are kept in CloudWatch."
  type        = number
}

variable "kms_key_arn" {
  description = "Key for the log of refused connections."
  type        = string
}
