//! What pods say to a table's home and what it answers, to and from their form on the link.
//!
//! *Owns*: those conversions.
//! *Does not own*: what is asked when (`route`), what comes of it (`home`).

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::ids::{LogId, OffsetRange, SessionId, StreamId, TableId, TableName};
use sluice_shared::proto;
use sluice_shared::requests::Boundary;

use crate::decode::ipc;

use super::home::{CommitRequest, Outcome};
use super::watermark::{Mark, RunKey, TAKEOVERS_MAX, Verdict};

fn garbled(what: &str) -> Error {
    Error::invalid("invalid_commit", format!("commit of another pod: {what}; do all pods run one release?"))
}

/// A request as it is sent.
///
/// # Errors
/// Where Arrow refuses, which it has no reason to.
pub(super) fn commit_request(
    table: &TableName,
    request: &CommitRequest,
) -> Result<proto::CommitRequest, ArrowError> {
    Ok(proto::CommitRequest {
        table: table.as_str().to_owned(),
        table_id: request.table.0.as_ref().to_owned(),
        pod: request.pod.as_str().to_owned(),
        log: request.log.0.to_string(),
        version: request.version,
        shape: request.shape,
        urgent: request.urgent,
        runs: request.runs.iter().map(judged_run).collect(),
        adds: encode_adds(&request.adds)?,
        ended: request.ended.iter().map(|stream| stream.as_str().to_owned()).collect(),
    })
}

/// A request as it was sent.
///
/// # Errors
/// Invalid where it is none.
pub(super) fn read_commit_request(request: proto::CommitRequest) -> Result<CommitRequest, Error> {
    Ok(CommitRequest {
        pod: request.pod.parse()?,
        table: TableId(request.table_id.into()),
        version: request.version,
        shape: request.shape,
        log: read_log(&request.log)?,
        urgent: request.urgent,
        runs: request.runs.into_iter().map(read_judged_run).collect::<Result<_, _>>()?,
        adds: decode_adds(&request.adds).map_err(|error| garbled(&format!("its files: {error}")))?,
        ended: request.ended.iter().map(|stream| stream.parse()).collect::<Result<_, _>>()?,
    })
}

/// A log's id as it was sent.
///
/// # Errors
/// Invalid where it is none.
pub(super) fn read_log(id: &str) -> Result<LogId, Error> {
    id.parse().map(LogId).map_err(|_| garbled("no log id"))
}

fn judged_run((run, verdict): &(RunKey, Verdict)) -> proto::JudgedRun {
    let aside = match verdict {
        Verdict::Fenced { aside, .. } => aside.as_slice(),
        _ => &[],
    };
    let kind = match verdict {
        Verdict::Commit => proto::Verdict::Commit,
        Verdict::Duplicate => proto::Verdict::Duplicate,
        Verdict::Partial { .. } => proto::Verdict::Partial,
        Verdict::Fenced { .. } => proto::Verdict::Fenced,
        // Nobody sends one.
        Verdict::Held => proto::Verdict::Unspecified,
    };
    proto::JudgedRun {
        stream: run.stream.as_str().to_owned(),
        session: run.session.0,
        start: run.start,
        end: run.end,
        boundary: run.boundary.map(proto::Boundary::from),
        verdict: kind.into(),
        commit_from: verdict.commit_from(run).filter(|_| kind != proto::Verdict::Commit),
        aside: aside.iter().map(|part| proto::Offsets { start: part.start, end: part.end }).collect(),
    }
}

fn read_judged_run(judged: proto::JudgedRun) -> Result<(RunKey, Verdict), Error> {
    let verdict = match (judged.verdict(), judged.commit_from) {
        (proto::Verdict::Commit, _) => Verdict::Commit,
        (proto::Verdict::Duplicate, _) => Verdict::Duplicate,
        (proto::Verdict::Partial, Some(from)) => Verdict::Partial { from },
        (proto::Verdict::Fenced, commit_from) => {
            let aside = judged.aside.iter().map(|part| OffsetRange { start: part.start, end: part.end });
            Verdict::Fenced { aside: aside.collect(), commit_from }
        }
        _ => return Err(garbled("a run without its verdict")),
    };
    let run = RunKey {
        stream: judged.stream.parse()?,
        session: SessionId(judged.session),
        start: judged.start,
        end: judged.end,
        boundary: judged.boundary.map(Boundary::from),
    };
    Ok((run, verdict))
}

/// One stream for neighbours of one schema: that says the types of all statistics, and is long.
fn encode_adds(adds: &[RecordBatch]) -> Result<Vec<Bytes>, ArrowError> {
    let mut streams = Vec::new();
    for adds in adds.chunk_by(|a, b| a.schema() == b.schema()) {
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::try_new(&mut bytes, &adds[0].schema())?;
        adds.iter().try_for_each(|add| writer.write(add))?;
        writer.finish()?;
        drop(writer);
        streams.push(bytes.into());
    }
    Ok(streams)
}

fn decode_adds(streams: &[Bytes]) -> Result<Vec<RecordBatch>, ArrowError> {
    let mut adds = Vec::new();
    for bytes in streams {
        adds.extend(ipc::read_written(bytes)?.1);
    }
    Ok(adds)
}

/// A mark as it is sent.
pub(super) fn mark(stream: &StreamId, mark: &Mark) -> proto::Mark {
    let last = (mark.session, OffsetRange { start: mark.start, end: mark.next });
    let sessions = mark.before.iter().chain([&last]).map(|(session, offsets)| proto::SessionOffsets {
        session: session.0,
        start: offsets.start,
        end: offsets.end,
    });
    proto::Mark {
        stream: stream.as_str().to_owned(),
        sessions: sessions.collect(),
        boundary: mark.boundary.map(proto::Boundary::from),
    }
}

/// A mark as it was sent.
///
/// # Errors
/// Invalid where it is none.
pub(super) fn read_mark(sent: proto::Mark) -> Result<(StreamId, Mark), Error> {
    let offsets =
        |of: &proto::SessionOffsets| (SessionId(of.session), OffsetRange { start: of.start, end: of.end });
    let sessions: Vec<_> = sent.sessions.iter().map(offsets).collect();
    let follow = |pair: &[(SessionId, OffsetRange)]| pair[0].1.end == pair[1].1.start;
    let Some(((session, last), before)) = sessions.split_last() else {
        return Err(garbled("a mark without a session"));
    };
    if before.len() > TAKEOVERS_MAX || last.end < last.start || !sessions.windows(2).all(follow) {
        return Err(garbled("a mark whose sessions do not follow each other"));
    }
    let boundary = sent.boundary.map(Boundary::from);
    let mark =
        Mark { session: *session, start: last.start, next: last.end, before: before.to_vec(), boundary };
    Ok((sent.stream.parse()?, mark))
}

/// How a commit ended, as it is sent.
pub(super) fn outcome(outcome: Outcome) -> proto::CommitOutcome {
    match outcome {
        Outcome::Committed => proto::CommitOutcome::Committed,
        Outcome::Changed => proto::CommitOutcome::Changed,
        Outcome::Rewrite => proto::CommitOutcome::Rewrite,
        Outcome::Reshaped => proto::CommitOutcome::Reshaped,
    }
}

/// How a commit ended, as it was sent.
///
/// # Errors
/// Invalid where it is none.
pub(super) fn read_outcome(outcome: proto::CommitOutcome) -> Result<Outcome, Error> {
    Ok(match outcome {
        proto::CommitOutcome::Committed => Outcome::Committed,
        proto::CommitOutcome::Changed => Outcome::Changed,
        proto::CommitOutcome::Rewrite => Outcome::Rewrite,
        proto::CommitOutcome::Reshaped => Outcome::Reshaped,
        proto::CommitOutcome::Unspecified => return Err(garbled("an answer without its outcome")),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, StringArray};
    use uuid::Uuid;

    use super::*;

    fn stream(name: &str) -> StreamId {
        StreamId::named(&name.parse().expect("valid"), 1)
    }

    fn offsets(start: u64, end: u64) -> OffsetRange {
        OffsetRange { start, end }
    }

    #[test]
    fn a_request_comes_back_as_it_was() {
        let boundary = Some(Boundary { offset: 7, requests: 2 });
        let run = |start, boundary| RunKey {
            stream: stream("s"),
            session: SessionId(3),
            start,
            end: start + 10,
            boundary,
        };
        let fenced =
            |commit_from| Verdict::Fenced { aside: vec![offsets(30, 31), offsets(33, 35)], commit_from };
        let text = RecordBatch::try_from_iter([("path", Arc::new(StringArray::from(vec!["a"])) as _)]);
        let number = RecordBatch::try_from_iter([("path", Arc::new(Int64Array::from(vec![1])) as _)]);
        let (text, number) = (text.expect("valid"), number.expect("valid"));
        let request = CommitRequest {
            pod: "pod-1".parse().expect("valid"),
            table: TableId("t".into()),
            version: 9,
            shape: u64::MAX,
            log: LogId(Uuid::from_u128(1)),
            ended: vec![stream("e")],
            urgent: true,
            runs: vec![
                (run(0, boundary), Verdict::Commit),
                (run(10, None), Verdict::Duplicate),
                (run(20, None), Verdict::Partial { from: 25 }),
                (run(30, None), fenced(Some(35))),
                (run(40, None), fenced(None)),
            ],
            adds: vec![text.clone(), text.clone(), number, text],
        };
        let sent = commit_request(&"t".parse().expect("valid"), &request).expect("encodes");
        assert_eq!(sent.adds.len(), 3);
        let read = read_commit_request(sent).expect("reads");
        assert_eq!(format!("{read:?}"), format!("{request:?}"));
        assert!(
            read_commit_request(proto::CommitRequest {
                runs: vec![judged_run(&(run(0, None), Verdict::Held))],
                ..commit_request(&"t".parse().expect("valid"), &request).expect("encodes")
            })
            .is_err()
        );
    }

    #[test]
    fn a_mark_comes_back_as_it_was_and_a_broken_one_is_refused() {
        let before = vec![(SessionId(1), offsets(0, 5)), (SessionId(2), offsets(5, 5))];
        let boundary = Some(Boundary { offset: 4, requests: 1 });
        let whole = Mark { session: SessionId(4), start: 5, next: 9, before, boundary };
        let sent = mark(&stream("s"), &whole);
        assert_eq!(read_mark(sent.clone()).expect("reads"), (stream("s"), whole));
        let mut broken = sent.clone();
        broken.sessions[1].end = 6;
        assert!(read_mark(broken).is_err());
        assert!(read_mark(proto::Mark { sessions: Vec::new(), ..sent }).is_err());
    }
}
