//! An echo over the gateway's own WebSocket, for conformance suites: `deploy/conformance/websocket_cases.py` runs it.
//!
//! *Owns*: one process with it, until standard input ends.
//! *Does not own*: the echo (`sluice_gateway`).

use std::io::{Read, Write};

use sluice_gateway::{Gateway, GatewayConfig};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = GatewayConfig {
        listen: "127.0.0.1:0".to_owned(),
        quic_listen: Some("off".to_owned()),
        ..GatewayConfig::default()
    };
    let echo = Gateway::start_echo(config).await?;
    writeln!(std::io::stdout(), "listens on {}", echo.address())?;
    // Blocks this thread alone: the echo runs on others.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
