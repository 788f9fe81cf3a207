//! Randomness and time of a simulated thread: what would come from the operating system comes from a seed.
//!
//! The program puts itself before the C library's `getrandom` and `clock_gettime` (`libc_calls.rs`, in the binary) and asks
//! here first. Hash maps, random numbers, UUIDs and clocks of all crates are the same for the same seed then.
//!
//! *Owns*: the seed's numbers and the time of this thread.
//! *Does not own*: the calls that ask for them; the runtimes, whose virtual time it is told (`host`).

use std::cell::Cell;
use std::time::Duration;

/// Wall-clock time when a simulation begins: 2026-01-01T00:00:00Z.
const WALL_START: Duration = Duration::from_secs(1_767_225_600);
/// Monotonic time then: not 0, so that there is a before.
const MONOTONIC_START: Duration = Duration::from_secs(1_000_000);

thread_local! {
    /// Whether this thread is simulated. None of the cells has a destructor: they can be asked at any time.
    static ON: Cell<bool> = const { Cell::new(false) };
    static STATE: Cell<u64> = const { Cell::new(0) };
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// From now on this thread is simulated.
pub fn begin(seed: u64) {
    STATE.set(seed);
    NOW_NS.set(0);
    ON.set(true);
}

/// Whether this thread is simulated.
pub fn is_on() -> bool {
    ON.get()
}

/// Fills with the seed's next numbers.
pub fn fill(bytes: &mut [u8]) {
    for chunk in bytes.chunks_mut(8) {
        let number = next().to_le_bytes();
        chunk.copy_from_slice(&number[..chunk.len()]);
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn next() -> u64 {
    let state = STATE.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    STATE.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// It is so long since the simulation began.
pub fn set_now(since_start: Duration) {
    NOW_NS.set(u64::try_from(since_start.as_nanos()).unwrap_or(u64::MAX));
}

/// Time since 1970.
pub fn wall_clock() -> Duration {
    WALL_START + Duration::from_nanos(NOW_NS.get())
}

/// Time since some moment.
pub fn monotonic_clock() -> Duration {
    MONOTONIC_START + Duration::from_nanos(NOW_NS.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let of = |seed| {
            std::thread::spawn(move || {
                begin(seed);
                let mut bytes = [0; 20];
                fill(&mut bytes);
                (is_on(), bytes)
            })
            .join()
            .expect("no panic")
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert!(!is_on());
    }
}
