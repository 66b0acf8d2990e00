mock_provider "aws" {
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
}

variables {
  name           = "headrace-gpu-l4"
  cluster_name   = "headrace"
  role_arn       = "arn:aws:iam::123456789012:role/node"
  subnet_ids     = ["subnet-1", "subnet-2"]
  instance_types = ["g6.2xlarge"]
  min            = 0
  max            = 4
  disk_gib       = 200
  kms_key_arn    = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
}

run "gpu_nodes_are_labelled_and_keep_others_away" {
  command = plan

  variables {
    gpu_class = "l4"
    spot      = true
  }

  assert {
    condition     = aws_eks_node_group.this.labels["headrace/gpu-class"] == "l4"
    error_message = "a GPU node must carry its class"
  }

  assert {
    condition     = one(aws_eks_node_group.this.taint).key == "nvidia.com/gpu" && one(aws_eks_node_group.this.taint).effect == "NO_SCHEDULE"
    error_message = "a GPU node must keep other pods away"
  }

  assert {
    condition     = aws_eks_node_group.this.capacity_type == "SPOT" && strcontains(aws_eks_node_group.this.ami_type, "NVIDIA")
    error_message = "a spot GPU group must be one"
  }
}

run "cpu_nodes_have_no_taint" {
  command = plan

  assert {
    condition     = length(aws_eks_node_group.this.taint) == 0 && aws_eks_node_group.this.labels["headrace/nodes"] == "cpu"
    error_message = "a CPU node takes every pod"
  }
}

run "pods_cannot_reach_the_nodes_credentials" {
  command = plan

  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required" && aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "the metadata service must need a token, and not answer pods"
  }

  assert {
    condition     = aws_launch_template.this.block_device_mappings[0].ebs[0].encrypted == "true"
    error_message = "disks must be encrypted"
  }
}

run "a_group_of_at_most_none" {
  command = plan

  variables {
    max = 0
  }

  expect_failures = [var.max]
}
