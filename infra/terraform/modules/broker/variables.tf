variable "name" {
  description = "Name of the cluster and of what belongs to it."
  type        = string
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets in at least two zones."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "the broker needs subnets in at least two zones."
  }
}

variable "client_security_group_id" {
  description = "Whoever carries this group may reach the broker; nobody else."
  type        = string
}

variable "port" {
  description = "The broker's port."
  type        = number
  default     = 6379
}

variable "node_type" {
  description = "Size of a node. Memory decides: see docs/operations.md for bytes per live token."
  type        = string
}

variable "engine_version" {
  description = "Version of Valkey as MemoryDB counts."
  type        = string

  validation {
    condition     = can(regex("^([7-9]|[1-9][0-9])\\.[0-9]+$", var.engine_version))
    error_message = "engine_version must be 7.2 or newer, as <major>.<minor>."
  }
}

variable "parameter_group_family" {
  description = "Family of the parameter group; it goes with engine_version."
  type        = string
  default     = "memorydb_valkey7"
}

variable "shards" {
  description = "Servers that share the slots; `redis.shards` in headrace.yaml should be several times as many."
  type        = number
  default     = 1
}

variable "replicas_per_shard" {
  description = "Replicas of each, in other zones."
  type        = number
  default     = 2

  validation {
    condition     = var.replicas_per_shard >= 1
    error_message = "replicas_per_shard must be at least 1."
  }
}

variable "snapshot_days" {
  description = "Days for which daily snapshots are kept."
  type        = number
  default     = 7
}

variable "existing_acl" {
  description = "Name of an ACL to use in place of one that is made here."
  type        = string
  default     = null
}

variable "existing_parameter_group" {
  description = "Name of a parameter group to use in place of one that is made here; its maxmemory-policy must be noeviction."
  type        = string
  default     = null
}

variable "passwords" {
  description = "Passwords by user: gateway, worker, scaler, loader, ops."
  type        = map(set(string))
  sensitive   = true
  default     = {}
}

variable "kms_key_arn" {
  description = "Key for what is at rest."
  type        = string
}

variable "take_final_snapshot" {
  description = "Take a snapshot before the cluster is destroyed."
  type        = bool
  default     = true
}
