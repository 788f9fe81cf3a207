//! Tables that cannot be made: who asks is told at once, and what to do.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_table_whose_place_is_taken_is_refused_for_good_with_what_to_do() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let schema = root.path().join("main/default");
    std::fs::create_dir_all(&schema).expect("made");
    std::fs::write(schema.join("t"), "no directory").expect("written");
    let error = pod.tables.create(&name(), spec(numbers(), &[])).await.err().expect("refused");
    assert_eq!((error.code.as_str(), error.retryable), ("table_not_made", false), "{error}");
    assert!(error.message.contains("main.default.t") && error.message.contains("pod.tables_dir"), "{error}");
    pod.stop().await;
}
