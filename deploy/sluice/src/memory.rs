//! The allocator of the program, and of the C in it (zstd).
//!
//! *Owns*: which it is, and how it is set up.
//! *Does not own*: what the service may hold (`gateway.memory_bytes`, `pod.memory_bytes`).
//! Frames, batches and files of a megabyte pass from thread to thread here, some GB a second. What is kept of what was given back
//! was most of a pod's memory at full load: 2.4 GB with glibc's heaps, 2.0 with jemalloc's defaults, 1.5 as it is set up
//! here, of 1.2 in use. `MALLOC_CONF` of the environment goes over it.

use std::ffi::c_char;

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// - Few arenas, whatever the machine has: each keeps what was given back to it. Small sizes are kept by each thread.
/// - Large allocations among the others: their pages are used again, in place of going back to the system at once.
/// - What has not been used again after a second goes back.
/// - No huge pages by themselves: with a thousand tables a quarter of all time went to zeroing them for small buffers.
#[allow(unsafe_code, reason = "jemalloc reads this symbol before there is a main")]
#[used]
#[unsafe(export_name = "malloc_conf")]
// SAFETY: a text that ends with a zero and lives for ever; jemalloc declares this symbol as a pointer to such a text.
static SETTINGS: Option<&'static c_char> =
    Some(unsafe { &*c"narenas:4,oversize_threshold:0,dirty_decay_ms:1000".as_ptr() });
