//! The whole service in one thread: always the same by its seed, kept promises in many worlds, and a planted loss found.

use std::process::{Command, Output};

/// As many as `make test` has time for.
const SEEDS: u64 = 200;
/// Each of these kills pods while groups are on their way.
const PLANTED_SEEDS: u64 = 8;

fn simulate(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loadtest"));
    command.args(["sim", "cluster"]).args(arguments).output().expect("the program of this test starts")
}

fn text(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&output.stderr), text(&output.stdout))
}

#[test]
fn a_seed_has_one_history() {
    let seed: u64 = rand::random_range(1_000..1_000_000);
    println!("seed {seed}: repeat it with `loadtest sim cluster --seed {seed}`");
    let [one, other] = [(), ()].map(|()| text(&simulate(&["--seed", &seed.to_string()])));
    assert!(one.contains("history"), "{one}");
    assert_eq!(one, other);
}

#[test]
fn promises_are_kept_in_many_worlds() {
    let output = simulate(&["--seeds", &format!("1..{SEEDS}")]);
    println!("{}", text(&output));
    assert!(output.status.success(), "seeds broke promises: repeat one with `loadtest sim cluster --seed N`");
}

#[test]
fn acks_before_the_flush_are_found() {
    let output = simulate(&["--seeds", &format!("1..{PLANTED_SEEDS}"), "--plant-early-acks"]);
    let said = text(&output);
    assert!(!output.status.success() && said.contains("Lost"), "a disk that lies is not found:\n{said}");
}
