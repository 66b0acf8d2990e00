# One managed node group. With a GPU class its nodes carry the class as a label, and a taint that keeps other pods away.

locals {
  is_gpu = var.gpu_class != null
  labels = local.is_gpu ? { "headrace/gpu-class" = var.gpu_class } : { "headrace/nodes" = "cpu" }
}

resource "aws_launch_template" "this" {
  name_prefix = "${var.name}-"

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # pods cannot reach the node's credentials
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.disk_gib
      throughput            = local.is_gpu ? 500 : 125 # weights are read from it at a start
      iops                  = 3000
      encrypted             = true
      kms_key_id            = var.kms_key_arn
      delete_on_termination = true
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = { Name = var.name }
  }
}

resource "aws_eks_node_group" "this" {
  cluster_name    = var.cluster_name
  node_group_name = var.name
  node_role_arn   = var.role_arn
  subnet_ids      = var.subnet_ids
  ami_type        = local.is_gpu ? "AL2023_x86_64_NVIDIA" : "AL2023_x86_64_STANDARD"
  instance_types  = var.instance_types
  capacity_type   = var.spot ? "SPOT" : "ON_DEMAND"
  labels          = local.labels

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  scaling_config {
    min_size     = var.min
    max_size     = var.max
    desired_size = var.min
  }

  update_config {
    max_unavailable = 1
  }

  dynamic "taint" {
    for_each = local.is_gpu ? [1] : []

    content {
      key    = "nvidia.com/gpu"
      value  = "present"
      effect = "NO_SCHEDULE"
    }
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size] # the cluster autoscaler's from then on
  }
}
