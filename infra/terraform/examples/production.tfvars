# Two classes of GPUs for people, one on spot for batch; the broker on three servers.

name             = "headrace"
region           = "eu-central-1"
zones            = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
grafana          = true
log_days         = 90
api_access_cidrs = ["192.0.2.0/24"]

cpu_nodes = { instance_types = ["m7i.2xlarge"], min = 3, max = 30 }

gpu_nodes = {
  l4       = { instance_types = ["g6.2xlarge"], min = 2, max = 40 }
  h100     = { instance_types = ["p5.48xlarge"], max = 4, zones = ["eu-central-1b"], disk_gib = 1000 }
  l4-batch = { instance_types = ["g6.2xlarge", "gr6.4xlarge"], max = 60, spot = true }
}

broker = { node_type = "db.r7g.2xlarge", shards = 3, replicas_per_shard = 2 }
