mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
  }

  mock_data "aws_region" {
    defaults = { name = "eu-central-1" }
  }
}

variables {
  name        = "headrace"
  cidr        = "10.40.0.0/16"
  zones       = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
  log_days    = 30
  kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
}

run "three_zones_of_three_kinds_of_subnets" {
  command = plan

  assert {
    condition     = length(aws_subnet.public) == 3 && length(aws_subnet.private) == 3 && length(aws_subnet.data) == 3
    error_message = "each zone needs a subnet of each kind"
  }

  assert {
    condition     = length(distinct(concat([for s in aws_subnet.public : s.cidr_block], [for s in aws_subnet.private : s.cidr_block], [for s in aws_subnet.data : s.cidr_block]))) == 9
    error_message = "no two subnets may be the same"
  }

  assert {
    condition     = aws_subnet.private["eu-central-1a"].cidr_block == "10.40.0.0/18" && aws_subnet.data["eu-central-1c"].cidr_block == "10.40.240.0/21" && aws_subnet.public["eu-central-1a"].cidr_block == "10.40.192.0/21"
    error_message = "subnets must be where they always were: moving one replaces it"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 3 && length(aws_route.nat) == 3
    error_message = "each zone needs its own way out"
  }

  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && aws_vpc_endpoint.s3.service_name == "com.amazonaws.eu-central-1.s3"
    error_message = "S3 must be reached through a gateway endpoint"
  }
}

run "one_nat_gateway" {
  command = plan

  variables {
    single_nat_gateway = true
  }

  assert {
    condition     = keys(aws_nat_gateway.this) == ["eu-central-1a"] && length(aws_route.nat) == 3
    error_message = "all zones must share the one gateway"
  }
}

run "the_smallest_range" {
  command = plan

  variables {
    cidr = "10.40.16.0/20"
  }

  assert {
    condition     = aws_subnet.data["eu-central-1a"].cidr_block == "10.40.30.0/25"
    error_message = "a /20 must do"
  }
}
