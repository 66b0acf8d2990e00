# A region: network, cluster, broker, registry, weights, metrics, and the roles between them. What runs in the cluster is
# applied after this, with helm and kubectl: see the README.

module "encryption" {
  source = "./modules/encryption"

  name = var.name
}

module "network" {
  source = "./modules/network"

  name               = var.name
  cidr               = var.vpc_cidr
  zones              = var.zones
  single_nat_gateway = var.single_nat_gateway
  log_days           = var.log_days
  kms_key_arn        = module.encryption.key_arn
}

module "cluster" {
  source = "./modules/cluster"

  name               = var.name
  kubernetes_version = var.kubernetes_version
  subnet_ids         = module.network.private_subnet_ids
  api_access_cidrs   = var.api_access_cidrs
  admin_role_arns    = var.admin_role_arns
  addons             = var.addons
  kms_key_arn        = module.encryption.key_arn
  log_days           = var.log_days
}

module "cpu_nodes" {
  source = "./modules/nodes"

  name           = "${var.name}-cpu"
  cluster_name   = module.cluster.name
  role_arn       = module.cluster.node_role_arn
  subnet_ids     = module.network.private_subnet_ids
  instance_types = var.cpu_nodes.instance_types
  min            = var.cpu_nodes.min
  max            = var.cpu_nodes.max
  disk_gib       = var.cpu_nodes.disk_gib
  kms_key_arn    = module.encryption.key_arn
}

module "gpu_nodes" {
  source   = "./modules/nodes"
  for_each = var.gpu_nodes

  name           = "${var.name}-gpu-${each.key}"
  cluster_name   = module.cluster.name
  role_arn       = module.cluster.node_role_arn
  subnet_ids     = [for zone in coalesce(each.value.zones, var.zones) : module.network.private_subnet_ids_by_zone[zone]]
  instance_types = each.value.instance_types
  min            = each.value.min
  max            = each.value.max
  disk_gib       = each.value.disk_gib
  spot           = each.value.spot
  gpu_class      = each.key
  kms_key_arn    = module.encryption.key_arn
}

module "broker" {
  source = "./modules/broker"

  name                     = var.name
  vpc_id                   = module.network.vpc_id
  subnet_ids               = module.network.data_subnet_ids
  client_security_group_id = module.cluster.security_group_id
  node_type                = var.broker.node_type
  engine_version           = var.broker.engine_version
  shards                   = var.broker.shards
  replicas_per_shard       = var.broker.replicas_per_shard
  snapshot_days            = var.broker.snapshot_days
  existing_acl             = var.broker.acl_name
  existing_parameter_group = var.broker.parameter_group_name
  passwords                = var.broker_passwords
  kms_key_arn              = module.encryption.key_arn
  take_final_snapshot      = var.deletion_protection
}

module "registry" {
  source = "./modules/registry"

  repositories = [for image in ["api", "worker-llamacpp", "worker-vllm"] : "${var.name}/${image}"]
  kms_key_arn  = module.encryption.key_arn
  force_delete = !var.deletion_protection
}

module "weights" {
  source = "./modules/weights"

  name            = var.name
  kms_key_arn     = module.encryption.key_arn
  vpc_endpoint_id = module.network.s3_endpoint_id
  force_destroy   = !var.deletion_protection
}

module "secrets" {
  source = "./modules/secrets"

  name        = var.name
  secrets     = ["broker-gateway", "broker-worker", "broker-scaler", "broker-loader", "ray-redis"]
  kms_key_arn = module.encryption.key_arn
  keep_days   = var.deletion_protection ? 7 : 0
}

module "metrics" {
  source = "./modules/metrics"

  name        = var.name
  grafana     = var.grafana
  log_days    = var.log_days
  kms_key_arn = module.encryption.key_arn
}
