//! Inputs like others: what a test does in the place of a fuzzer that sees which code it reaches.
//!
//! *Owns*: how an input is altered.
//! *Does not own*: which are run, and how often.

use rand::RngExt;
use rand::rngs::StdRng;

/// Bytes that are written over others.
const EDGES: [u8; 8] = [0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'\n'];
/// Steps from one input to the next.
const STEPS_MAX: u32 = 5;

/// An input like one of these, of at most so many bytes.
pub fn like(inputs: &[Vec<u8>], bytes_max: usize, random: &mut StdRng) -> Vec<u8> {
    let pick = |random: &mut StdRng| inputs.get(random.random_range(0..inputs.len().max(1)));
    let mut input = pick(random).cloned().unwrap_or_default();
    for _ in 0..=random.random_range(0..STEPS_MAX) {
        let at = random.random_range(0..=input.len());
        let until = at + random.random_range(0..=(input.len() - at).min(32));
        match random.random_range(0..8) {
            0 => drop(input.drain(at..until)),
            1 => drop(input.splice(at..at, input[at..until].to_vec()).count()),
            2 => {
                let other = pick(random).cloned().unwrap_or_default();
                let from = random.random_range(0..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            3 => input.truncate(at),
            4 => input[at..until]
                .iter_mut()
                .for_each(|byte| *byte = EDGES[random.random_range(0..EDGES.len())]),
            5 => drop(input.splice(at..at, [random.random::<u8>()]).count()),
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << random.random_range(0..8);
                }
            }
        }
    }
    input.truncate(bytes_max);
    input
}
