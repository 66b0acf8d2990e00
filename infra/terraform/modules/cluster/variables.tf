variable "name" {
  description = "Name of the cluster."
  type        = string
}

variable "kubernetes_version" {
  description = "EKS version."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets, one a zone."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "EKS needs subnets in at least two zones."
  }
}

variable "api_access_cidrs" {
  description = "Who may reach the Kubernetes API over the internet; none makes it private."
  type        = list(string)
  default     = []
}

variable "admin_role_arns" {
  description = "IAM roles that administer the cluster."
  type        = list(string)
  default     = []
}

variable "addons" {
  description = "Add-ons by name, with their version or null."
  type        = map(string)
  default     = {}
}

variable "kms_key_arn" {
  description = "Key for Kubernetes secrets and the control plane's log."
  type        = string
}

variable "log_days" {
  description = "How long the control plane's log is kept."
  type        = number
}
