//! Generates the services from their .proto files with a compiler written in Rust, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/proto");
    let descriptors = protox::compile(["src/proto/pod.proto", "src/proto/zerobus.proto"], ["src/proto"])?;
    tonic_prost_build::configure()
        .bytes(".sluice.pod.v1")
        .bytes(".databricks.zerobus")
        .compile_fds(descriptors)?;
    Ok(())
}
