variable "name" {
  description = "Name of the node group."
  type        = string
}

variable "cluster_name" {
  description = "The EKS cluster."
  type        = string
}

variable "role_arn" {
  description = "Role of the nodes."
  type        = string
}

variable "subnet_ids" {
  description = "Where nodes may be; spot groups should have several zones."
  type        = list(string)
}

variable "instance_types" {
  description = "Instance types, in the order of preference; all must have the same CPU and memory to be scaled well."
  type        = list(string)

  validation {
    condition     = length(var.instance_types) > 0
    error_message = "instance_types must name at least one."
  }
}

variable "min" {
  description = "Least number of nodes."
  type        = number

  validation {
    condition     = var.min >= 0
    error_message = "min must not be negative."
  }
}

variable "max" {
  description = "Largest number of nodes."
  type        = number

  validation {
    condition     = var.max >= 1
    error_message = "max must be at least 1."
  }
}

variable "disk_gib" {
  description = "Size of the root disk, which holds images and weights, in GiB."
  type        = number

  validation {
    condition     = var.disk_gib >= 20
    error_message = "disk_gib must be at least 20."
  }
}

variable "spot" {
  description = "Spot instances: two minutes' notice; for work that another node may take over."
  type        = bool
  default     = false
}

variable "gpu_class" {
  description = "Value of the label headrace/gpu-class; null for nodes without GPUs."
  type        = string
  default     = null
}

variable "kms_key_arn" {
  description = "Key for the nodes' disks."
  type        = string
}
