//! Generates the services from their .proto files with a compiler written in Rust, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/proto");
    let descriptors = protox::compile(
        ["src/proto/pod.proto", "src/proto/zerobus.proto", "src/proto/flight.proto"],
        ["src/proto"],
    )?;
    tonic_prost_build::configure()
        .codec_path("crate::codec::SmallCodec")
        // By far the largest request, and the rarest: queues of requests would be made for it.
        .boxed(".sluice.pod.v1.StreamRequest.kind.open")
        .bytes(".sluice.pod.v1")
        .bytes(".databricks.zerobus")
        .bytes(".arrow.flight.protocol")
        .compile_fds(descriptors)?;
    Ok(())
}
