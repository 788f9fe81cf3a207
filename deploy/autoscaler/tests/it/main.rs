//! The autoscaler through its public API: real child processes, and servers that stand for gateways and Kubernetes.

mod admin;
mod fake;
mod kubernetes;
mod process;
mod whole;
