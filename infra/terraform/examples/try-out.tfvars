# A few days to look at it: one way out, one small GPU node on spot, nothing is kept when it is destroyed.

name                = "headrace-try"
single_nat_gateway  = true
deletion_protection = false
log_days            = 3

cpu_nodes = { instance_types = ["m7i.large"], max = 4 }
gpu_nodes = { l4 = { instance_types = ["g6.xlarge"], max = 1, spot = true, disk_gib = 100 } }
broker    = { node_type = "db.t4g.small", replicas_per_shard = 1, snapshot_days = 0 }
