variable "name" {
  description = "Name of the deployment; log groups below it may use the key."
  type        = string
}
