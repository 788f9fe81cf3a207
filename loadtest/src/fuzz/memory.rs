//! How much memory an execution asks for: counted by an allocator that a program has to install.
//!
//! *Owns*: the allocator, the count of its thread.
//! *Does not own*: what is too much (`fuzz`).

#![allow(unsafe_code, reason = "an allocator is handed on to the system's, by its own contract")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, and a count of each thread's bytes.
#[derive(Debug)]
pub struct Counted;

fn add(bytes: usize, sign: isize) {
    let held = HELD.get() + sign * bytes.cast_signed();
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: all calls go to the system's allocator as they come; the counts are cells without a destructor.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size(), 1);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size(), 1);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        add(layout.size(), -1);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        add(layout.size(), -1);
        add(bytes, 1);
        // SAFETY: the caller's promise is handed on.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// Runs `run`, and answers how many bytes more than before its thread held at most meanwhile: 0 where the program has
/// another allocator.
pub fn peak_of(run: impl FnOnce()) -> usize {
    let before = HELD.get();
    PEAK.set(before);
    run();
    usize::try_from(PEAK.get() - before).unwrap_or(0)
}
