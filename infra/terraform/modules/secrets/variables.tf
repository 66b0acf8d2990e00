variable "name" {
  description = "Name of the deployment."
  type        = string
}

variable "secrets" {
  description = "What each secret holds; its name is <deployment>/<this>."
  type        = list(string)
}

variable "kms_key_arn" {
  description = "Key for the secrets."
  type        = string
}

variable "keep_days" {
  description = "Days for which a destroyed secret can be had back; 0 for none."
  type        = number
  default     = 7

  validation {
    condition     = var.keep_days == 0 || (var.keep_days >= 7 && var.keep_days <= 30)
    error_message = "keep_days must be 0 or 7 to 30."
  }
}
