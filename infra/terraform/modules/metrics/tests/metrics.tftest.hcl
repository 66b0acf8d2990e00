# Amazon Managed Grafana, which no simulated AWS has.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
  }
}

variables {
  name        = "headrace"
  log_days    = 30
  kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
}

run "without_grafana" {
  command = plan

  assert {
    condition     = length(aws_grafana_workspace.this) == 0 && output.grafana_url == null
    error_message = "Grafana is made only if it is asked for"
  }
}

run "with_grafana" {
  command = plan

  variables {
    grafana = true
  }

  assert {
    condition     = aws_grafana_workspace.this[0].permission_type == "CUSTOMER_MANAGED" && toset(aws_grafana_workspace.this[0].data_sources) == toset(["PROMETHEUS"])
    error_message = "Grafana must read Prometheus, by a role of its own"
  }
}
