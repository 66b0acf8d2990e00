variable "name" {
  description = "Name of the deployment; every resource's name begins with it."
  type        = string
  default     = "headrace"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,23}$", var.name))
    error_message = "name must be 3 to 24 lower-case letters, digits and hyphens, and begin with a letter."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "eu-central-1"

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must look like eu-central-1."
  }
}

variable "zones" {
  description = "Three availability zones of the region. GPUs are not offered in all of them: see the README."
  type        = list(string)
  default     = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]

  validation {
    condition     = length(distinct(var.zones)) == 3
    error_message = "zones must name three different availability zones."
  }
}

variable "tags" {
  description = "More tags for every resource."
  type        = map(string)
  default     = {}
}

variable "vpc_cidr" {
  description = "Address range of the VPC, /16 to /20. Every pod takes an address of a private subnet."
  type        = string
  default     = "10.40.0.0/16"

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16 && tonumber(split("/", var.vpc_cidr)[1]) <= 20, false)
    error_message = "vpc_cidr must be an IPv4 range from /16 to /20."
  }
}

variable "single_nat_gateway" {
  description = "One NAT gateway for all zones: cheaper, and a zone that fails takes the others' way out with it."
  type        = bool
  default     = false
}

variable "namespace" {
  description = "Kubernetes namespace of headrace's own pods and workers; the roles trust service accounts of it only."
  type        = string
  default     = "headrace"
}

variable "kubernetes_version" {
  description = "EKS version, `1.<minor>`."
  type        = string
  default     = "1.33"

  validation {
    condition     = can(regex("^1\\.(3[1-9]|[4-9][0-9])$", var.kubernetes_version))
    error_message = "kubernetes_version must be 1.31 or newer."
  }
}

variable "api_access_cidrs" {
  description = "Who may reach the Kubernetes API over the internet; none makes it private to the VPC."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.api_access_cidrs : can(cidrhost(cidr, 0)) && !endswith(cidr, "/0")])
    error_message = "api_access_cidrs must be address ranges, and none may be everybody (/0)."
  }
}

variable "admin_role_arns" {
  description = "IAM roles that administer the cluster (AmazonEKSClusterAdminPolicy)."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.admin_role_arns : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:role/", arn))])
    error_message = "admin_role_arns must be ARNs of IAM roles."
  }
}

variable "addons" {
  description = "EKS add-ons by name, with their version, or null for the default one of the cluster's version."
  type        = map(string)
  default = {
    "vpc-cni"                   = null
    "coredns"                   = null
    "kube-proxy"                = null
    "metrics-server"            = null
    "eks-node-monitoring-agent" = null
  }
}

variable "storage_addons" {
  description = "The same for disks (EBS) and the bucket of weights (S3), which act on AWS by roles of their own."
  type        = map(string)
  default = {
    "aws-ebs-csi-driver"           = null
    "aws-mountpoint-s3-csi-driver" = null
  }

  validation {
    condition     = alltrue([for name in keys(var.storage_addons) : contains(["aws-ebs-csi-driver", "aws-mountpoint-s3-csi-driver"], name)])
    error_message = "storage_addons may be aws-ebs-csi-driver and aws-mountpoint-s3-csi-driver."
  }
}

variable "cpu_nodes" {
  description = "Nodes for API pods, the Ray head, operators and monitoring."
  type = object({
    instance_types = optional(list(string), ["m7i.xlarge"])
    min            = optional(number, 3)
    max            = optional(number, 12)
    disk_gib       = optional(number, 50)
  })
  default = {}

  validation {
    condition     = var.cpu_nodes.min >= 3 && var.cpu_nodes.max >= var.cpu_nodes.min
    error_message = "cpu_nodes.min must be at least 3, one a zone, and max not below it."
  }
}

variable "gpu_nodes" {
  description = "GPU node groups by class. A model names its class; Ray places its replicas there. `spot` is for batch."
  type = map(object({
    instance_types = list(string)
    min            = optional(number, 0)
    max            = number
    spot           = optional(bool, false)
    zones          = optional(list(string))
    disk_gib       = optional(number, 200)
  }))
  default = {
    l4       = { instance_types = ["g6.2xlarge"], min = 1, max = 8 }
    l4-batch = { instance_types = ["g6.2xlarge", "g6.4xlarge"], max = 16, spot = true }
  }

  validation {
    condition     = alltrue([for class, _ in var.gpu_nodes : can(regex("^[a-z0-9][a-z0-9-]{0,19}$", class))])
    error_message = "the names of GPU classes must be 1 to 20 lower-case letters, digits and hyphens."
  }

  validation {
    condition     = alltrue([for nodes in values(var.gpu_nodes) : nodes.min >= 0 && nodes.max >= max(1, nodes.min) && length(nodes.instance_types) > 0])
    error_message = "each GPU class needs an instance type, min >= 0 and max >= max(1, min)."
  }
}

variable "broker" {
  description = "MemoryDB. `acl_name` and `parameter_group_name` take existing ones in place of those that are made here."
  type = object({
    node_type            = optional(string, "db.r7g.large")
    engine_version       = optional(string, "7.3")
    shards               = optional(number, 1)
    replicas_per_shard   = optional(number, 2)
    snapshot_days        = optional(number, 7)
    acl_name             = optional(string)
    parameter_group_name = optional(string)
  })
  default = {}

  validation {
    condition     = var.broker.replicas_per_shard >= 1 && var.broker.replicas_per_shard <= 5
    error_message = "broker.replicas_per_shard must be 1 to 5: without a replica a lost zone is a lost broker."
  }

  validation {
    condition     = var.broker.shards >= 1 && var.broker.shards <= 500
    error_message = "broker.shards must be 1 to 500."
  }

  validation {
    condition     = var.broker.acl_name != "open-access"
    error_message = "broker.acl_name must not be open-access: it lets in everybody who reaches the port."
  }
}

variable "broker_passwords" {
  description = "Passwords of the broker's users `gateway`, `worker`, `scaler`, `loader` and `ops`: one each, or two while one is replaced."
  type        = map(set(string))
  sensitive   = true
  default     = {}

  validation {
    condition = alltrue(flatten([
      for user, passwords in var.broker_passwords : [
        contains(["gateway", "worker", "scaler", "loader", "ops"], user), length(passwords) >= 1, length(passwords) <= 2,
        [for password in passwords : length(password) >= 32 && length(password) <= 128],
      ]
    ]))
    error_message = "broker_passwords must give gateway, worker, scaler, loader and ops one or two passwords of 32 to 128 characters each."
  }
}

variable "grafana" {
  description = "Also make an Amazon Managed Grafana workspace (needs IAM Identity Center in the account)."
  type        = bool
  default     = false
}

variable "log_days" {
  description = "How long CloudWatch keeps logs."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.log_days)
    error_message = "log_days must be one of the periods that CloudWatch offers (1, 3, 5, 7, 14, 30, 60, 90, ...)."
  }
}

variable "deletion_protection" {
  description = "Keep weights, images and the broker's last snapshot from being destroyed; false for a try-out."
  type        = bool
  default     = true
}
