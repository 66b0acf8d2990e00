# Places for secrets, empty: their values are put in by hand (see the README), so that no state holds them.

resource "aws_secretsmanager_secret" "this" {
  for_each = toset(var.secrets)

  name                    = "${var.name}/${each.value}"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.keep_days
}

data "aws_iam_policy_document" "read" {
  statement {
    sid       = "Read"
    actions   = ["secretsmanager:GetSecretValue", "secretsmanager:DescribeSecret"]
    resources = [for secret in aws_secretsmanager_secret.this : secret.arn]
  }

  statement {
    sid       = "Decrypt"
    actions   = ["kms:Decrypt"]
    resources = [var.kms_key_arn]
  }
}
