//! Why a stream would go where it would go.
//!
//! *Owns*: what is told of a decision.
//! *Does not own*: the decision: it is asked for, and what it looked at is put beside it.

use rand::Rng;
use serde::Serialize;
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::lifecycle::Phase;
use sluice_shared::pool::{PodLoad, PoolView, REPORT_DEAD};

use super::{Choice, HARD_LIMIT, NoPlace, Rule, StreamHints, place};

/// A decision, and what it was made from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The table.
    pub table: TableName,
    /// The pod that commits to it.
    pub home: Option<PodId>,
    /// Which rule decided; None where no pod takes the stream.
    pub rule: Option<Rule>,
    /// Where the stream would go.
    pub pod: Option<PodId>,
    /// Why nowhere.
    pub refusal: Option<&'static str>,
    /// Load up to which a pod takes the stream.
    pub bound: f64,
    /// Mean of the corrected loads.
    pub mean: f64,
    /// On how many pods of its order the table stands.
    pub spread: usize,
    /// What the stream is expected to send.
    pub bytes_per_s: f64,
    /// All active pods in the table's order, as this gateway goes through it; then the others.
    pub candidates: Vec<Explained>,
}

/// One pod as the decision saw it. Loads are fractions of its capacity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explained {
    /// The pod.
    pub pod: PodId,
    /// Corrected load: `reported`, and `placed` by this gateway and by as much by each other one.
    pub load: f64,
    /// As reported, drawn toward the mean as the report grows old.
    pub reported: f64,
    /// By this gateway, and not yet covered by a report.
    pub placed: f64,
    /// What the stream is expected to add.
    pub adds: f64,
    /// How old the report is, in ms.
    pub report_age_ms: u64,
    /// Whether it is among the pods that the table stands on.
    pub is_first: bool,
    /// Whether it may take the stream at all.
    pub usable: bool,
    /// What keeps it from being used; of a pod that is usable, what kept it from being chosen.
    pub why_not: Option<String>,
}

/// Decides, and tells why.
pub fn explain(
    view: &PoolView,
    table: &TableName,
    hints: &StreamHints<'_>,
    rng: &mut impl Rng,
) -> Explanation {
    let placed = place(view, table, hints, rng);
    let refusal = placed.as_ref().err().map(|no_place| match no_place {
        NoPlace::Empty => "no pod is active, or all that are have refused the stream",
        NoPlace::Full => "all pods report that they are full",
    });
    let mut explanation = Explanation {
        table: table.clone(),
        home: view.home(table).map(|pod| pod.id.clone()),
        rule: placed.as_ref().ok().map(|placement| placement.rule),
        pod: placed.ok().map(|placement| placement.pod),
        refusal,
        bound: 0.0,
        mean: 0.0,
        spread: 0,
        bytes_per_s: 0.0,
        candidates: Vec::new(),
    };
    let Ok(choice) = Choice::new(view, table, hints) else {
        explanation.candidates = view.pods().iter().filter_map(|pod| outside(view, &pod.id)).collect();
        return explanation;
    };
    (explanation.bound, explanation.mean) = (choice.bound, choice.mean);
    (explanation.spread, explanation.bytes_per_s) = (choice.spread, choice.bytes_per_s);
    let usable: Vec<PodLoad<'_>> = choice.order().collect();
    let chosen = explanation.pod.clone();
    let inside = usable.iter().enumerate().map(|(nth, pod)| {
        let why_not = (chosen.as_ref() != Some(&pod.pod.id)).then(|| choice.why_not(pod, nth));
        Explained { is_first: nth < choice.spread, usable: true, why_not, ..choice.explained(pod) }
    });
    let is_left = |id: &PodId| !usable.iter().any(|pod| pod.pod.id == *id);
    let left = view.pods().iter().filter(|pod| is_left(&pod.id)).filter_map(|pod| view.load(&pod.id));
    let left =
        left.map(|pod| Explained { why_not: Some(choice.why_unusable(&pod)), ..choice.explained(&pod) });
    explanation.candidates = inside.chain(left).collect();
    explanation
}

impl Choice<'_> {
    fn explained(&self, load: &PodLoad<'_>) -> Explained {
        Explained { adds: self.adds(load.pod), ..bare(load) }
    }

    fn why_not(&self, pod: &PodLoad<'_>, nth: usize) -> String {
        let with = pod.load + self.adds(pod.pod);
        if pod.reported >= HARD_LIMIT {
            return format!("reports {:.2}: {HARD_LIMIT} and more take nothing new", pod.reported);
        }
        let bound = self.bound_of(pod.pod);
        if with > bound {
            let new = if bound < self.bound { " of a pod that has just joined" } else { "" };
            return format!("{with:.2} with the stream, over the bound of {bound:.2}{new}");
        }
        if nth >= self.spread {
            return format!("the table stands on the first {} of its order", self.spread);
        }
        "another of the first was drawn, or is less loaded, or held the stream last".to_owned()
    }

    fn why_unusable(&self, pod: &PodLoad<'_>) -> String {
        let id = &pod.pod.id;
        match pod.pod.phase {
            Phase::Active if self.hints.tried.contains(id) => "has refused the stream just now".to_owned(),
            Phase::Active if pod.pod.aside => "set aside: a call to it has just failed".to_owned(),
            Phase::Active => silent(pod),
            Phase::Joining => "joining: takes no streams yet".to_owned(),
            Phase::Draining | Phase::Drained | Phase::Undrained => {
                "draining: takes no new streams".to_owned()
            }
        }
    }
}

fn silent(pod: &PodLoad<'_>) -> String {
    let age_s = pod.pod.load.age.as_secs();
    format!("silent: its last report is {age_s} s old, more than {} s", REPORT_DEAD.as_secs())
}

/// A pod where there is nothing to choose from.
fn outside(view: &PoolView, id: &PodId) -> Option<Explained> {
    let load = view.load(id)?;
    let why_not = match load.pod.phase {
        Phase::Active => "has refused the stream just now",
        Phase::Joining => "joining: takes no streams yet",
        Phase::Draining | Phase::Drained | Phase::Undrained => "draining: takes no new streams",
    };
    Some(Explained { why_not: Some(why_not.to_owned()), ..bare(&load) })
}

fn bare(load: &PodLoad<'_>) -> Explained {
    Explained {
        pod: load.pod.id.clone(),
        load: load.load,
        reported: load.reported,
        placed: load.pod.placed,
        adds: 0.0,
        report_age_ms: u64::try_from(load.pod.load.age.as_millis()).unwrap_or(u64::MAX),
        is_first: false,
        usable: false,
        why_not: None,
    }
}
