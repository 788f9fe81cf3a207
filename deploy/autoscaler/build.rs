//! Generates KEDA's service from its .proto file with a compiler written in Rust, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/proto");
    let descriptors = protox::compile(["src/proto/externalscaler.proto"], ["src/proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
