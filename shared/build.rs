//! Generates the pod service from its .proto with a compiler written in Rust, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/proto/pod.proto");
    let descriptors = protox::compile(["src/proto/pod.proto"], ["src/proto"])?;
    tonic_prost_build::configure().bytes(".sluice.pod.v1").compile_fds(descriptors)?;
    Ok(())
}
