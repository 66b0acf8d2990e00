# Amazon Managed Prometheus, which our Prometheus in the cluster writes to, and a Grafana that reads it.

resource "aws_cloudwatch_log_group" "this" {
  name              = "/aps/${var.name}"
  retention_in_days = var.log_days
  kms_key_id        = var.kms_key_arn
}

resource "aws_prometheus_workspace" "this" {
  alias = var.name

  logging_configuration {
    log_group_arn = "${aws_cloudwatch_log_group.this.arn}:*"
  }
}

data "aws_iam_policy_document" "write" {
  statement {
    actions   = ["aps:RemoteWrite"]
    resources = [aws_prometheus_workspace.this.arn]
  }
}

data "aws_iam_policy_document" "grafana_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["grafana.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "read" {
  statement {
    actions   = ["aps:QueryMetrics", "aps:GetSeries", "aps:GetLabels", "aps:GetMetricMetadata", "aps:DescribeWorkspace"]
    resources = [aws_prometheus_workspace.this.arn]
  }

  statement {
    actions   = ["aps:ListWorkspaces"]
    resources = ["*"]
  }
}

resource "aws_iam_role" "grafana" {
  count = var.grafana ? 1 : 0

  name               = "${var.name}-grafana"
  assume_role_policy = data.aws_iam_policy_document.grafana_trust.json
}

resource "aws_iam_role_policy" "grafana" {
  count = var.grafana ? 1 : 0

  name   = "only"
  role   = aws_iam_role.grafana[0].id
  policy = data.aws_iam_policy_document.read.json
}

resource "aws_grafana_workspace" "this" {
  count = var.grafana ? 1 : 0

  name                     = var.name
  account_access_type      = "CURRENT_ACCOUNT"
  authentication_providers = ["AWS_SSO"]
  permission_type          = "CUSTOMER_MANAGED"
  role_arn                 = aws_iam_role.grafana[0].arn
  data_sources             = ["PROMETHEUS"]
}
