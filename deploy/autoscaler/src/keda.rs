//! KEDA's external scaler: KEDA and the HPA start and end pods, and ask here how many.
//!
//! The metric is the number of pods itself, and one pod is worth 1 of it: the HPA divides and has the number. What is not
//! known is an error, at which the HPA keeps what it has. `StreamMetricSpec`, which is optional, is left out: what a pod is
//! worth never changes.
//!
//! *Owns*: the service. *Does not own*: the number. The HPA passes over differences of a tenth and less, and ends pods
//! without asking them to drain first: SIGTERM is their drain.

use std::pin::Pin;
use std::time::Duration;

use sluice_shared::lifecycle::TaskScope;
use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::app::Known;
use proto::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use proto::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec, MetricValue,
    ScaledObjectRef,
};

/// KEDA's messages, as generated.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod proto {
    tonic::include_proto!("externalscaler");
}

/// The one metric.
pub const METRIC: &str = "sluice-desired-pods";
/// A number that is older is not told: the HPA then keeps what it has.
const KNOWN_FOR: Duration = Duration::from_secs(30);

/// Answers KEDA with what was decided last.
pub(crate) struct Scaler {
    known: watch::Receiver<Known>,
    scope: TaskScope,
}

impl Scaler {
    pub(crate) fn service(known: watch::Receiver<Known>, scope: TaskScope) -> ExternalScalerServer<Self> {
        ExternalScalerServer::new(Self { known, scope })
    }

    fn pods(&self) -> Result<u32, Status> {
        let known = self.known.borrow();
        let decision = known.fresh(KNOWN_FOR).ok_or_else(|| {
            Status::unavailable(
                "the pool was not seen within 30 s: is a gateway's admin API reachable from the autoscaler?",
            )
        })?;
        Ok(decision.pods)
    }
}

type Answers = Pin<Box<dyn Stream<Item = Result<IsActiveResponse, Status>> + Send>>;

#[tonic::async_trait]
impl ExternalScaler for Scaler {
    /// Always: producers are taken from the first on, so that there is never no pod at all.
    async fn is_active(&self, _: Request<ScaledObjectRef>) -> Result<Response<IsActiveResponse>, Status> {
        Ok(Response::new(IsActiveResponse { result: true }))
    }

    type StreamIsActiveStream = Answers;

    async fn stream_is_active(&self, _: Request<ScaledObjectRef>) -> Result<Response<Answers>, Status> {
        let scope = self.scope.clone();
        // Told at once; it never changes, so that the stream then stays open until one of the two ends.
        let answers = futures_util::stream::unfold(Some(scope), |scope| async move {
            let scope = scope?;
            Some((Ok(IsActiveResponse { result: true }), Some(scope)))
        });
        let first = futures_util::StreamExt::take(answers, 1);
        let scope = self.scope.clone();
        let rest = futures_util::stream::unfold(scope, |scope| async move {
            scope.draining().await;
            None
        });
        Ok(Response::new(Box::pin(futures_util::StreamExt::chain(first, rest))))
    }

    async fn get_metric_spec(
        &self,
        _: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        let spec = MetricSpec { metric_name: METRIC.to_owned(), target_size: 1, target_size_float: 1.0 };
        Ok(Response::new(GetMetricSpecResponse { metric_specs: vec![spec] }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let asked = request.into_inner().metric_name;
        if asked != METRIC {
            return Err(Status::invalid_argument(format!("no metric {asked:?}: there is {METRIC:?}")));
        }
        let pods = self.pods()?;
        let value =
            MetricValue { metric_name: asked, metric_value: pods.into(), metric_value_float: pods.into() };
        Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
    }
}
