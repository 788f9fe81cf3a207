//! Protobuf over gRPC with small buffers: a stream that says little must not hold two times 8 KiB on either side for it.
//!
//! *Owns*: how large the buffers of a call are.
//! *Does not own*: the messages (`proto`), which are encoded as everywhere (`tonic_prost`).

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// Of each direction of a call. What is larger makes its own room, in one step.
const BUFFER_BYTES: usize = 512;
/// Messages that wait are sent together up to here, as by tonic's default.
const TOGETHER_BYTES: usize = 32 << 10;

/// The codec of all generated services.
#[derive(Debug, Clone)]
pub struct SmallCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, TOGETHER_BYTES)
}

impl<T, U> Codec for SmallCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(settings())
    }
}
