variable "repositories" {
  description = "Names of the repositories."
  type        = list(string)

  validation {
    condition     = alltrue([for name in var.repositories : can(regex("^[a-z0-9]+([._/-][a-z0-9]+)*$", name))])
    error_message = "repository names are lower-case letters and digits, separated by . _ / or -."
  }
}

variable "kms_key_arn" {
  description = "Key for the images."
  type        = string
}

variable "force_delete" {
  description = "Destroy repositories that hold images."
  type        = bool
  default     = false
}
