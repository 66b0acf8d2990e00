variable "name" {
  description = "Name of the role."
  type        = string
}

variable "namespace" {
  description = "Namespace of the service account."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]*$", var.namespace))
    error_message = "namespace must be a name, without wildcards."
  }
}

variable "service_account" {
  description = "Name of the service account."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]*$", var.service_account))
    error_message = "service_account must be a name, without wildcards."
  }
}

variable "oidc_provider_arn" {
  description = "The cluster's identity provider."
  type        = string
}

variable "oidc_issuer" {
  description = "Its URL without the scheme."
  type        = string
}

variable "policies" {
  description = "What the role may do: policies as JSON, by name."
  type        = map(string)
  default     = {}
}

variable "managed_policies" {
  description = "Names of AWS's own policies, for its own drivers."
  type        = list(string)
  default     = []
}
