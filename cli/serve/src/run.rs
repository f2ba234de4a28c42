//! Connections, from the first one to the end of the last.
use crate::engine::Engine;
use crate::options::Options;
use crate::patience::Patience;
use crate::router::router;
use crate::served::Served;
use crate::server::{Phase, Server};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use q4_core::{Code, Error, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How long answers that were told to end may take for that.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes of a connection that are read and not yet taken, the most that a head may have.
const BUFFER: usize = 32 << 10;

/// Serves on a runtime of its own until `stop` is over; see [`serve`].
///
/// # Errors
/// [`Code::Io`] where the system gives no threads or the listener is none, [`Code::Usage`] for keys and
/// origins that cannot work.
pub fn run(
    listener: std::net::TcpListener,
    served: Arc<Served>,
    engine: Arc<dyn Engine>,
    options: Options,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Templates and tokenizers compute: more of them than processors only wait for each other.
        .max_blocking_threads(std::thread::available_parallelism().map_or(2, |n| n.get()).max(2))
        .thread_name("q4-serve")
        .enable_all()
        .build()
        .map_err(|e| Error::new(Code::Io, format!("no threads for the server: {e}")))?;
    let result = runtime.block_on(serve(listener, served, engine, options, stop));
    runtime.shutdown_timeout(FAREWELL);
    result
}

/// Serves until `stop` is over, then drains: new requests are refused with 503, answers in flight go on for
/// at most [`Options::drain_timeout`], and what is left then is told that it ends.
///
/// # Errors
/// [`Code::Io`] for a listener that is none, [`Code::Usage`] for keys and origins that cannot work.
pub async fn serve(
    listener: std::net::TcpListener,
    served: Arc<Served>,
    engine: Arc<dyn Engine>,
    options: Options,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    options.check()?;
    let unusable = |e: std::io::Error| Error::new(Code::Io, format!("the listener cannot be used: {e}"));
    listener.set_nonblocking(true).map_err(unusable)?;
    let listener = TcpListener::from_std(listener).map_err(unusable)?;
    let server = Server::new(served, engine, options);
    let graceful = GracefulShutdown::new();
    {
        let accept = accept(&listener, &server, &graceful);
        let end = async {
            stop.await;
            drain(&server).await;
        };
        tokio::select! {
            () = accept => {}
            () = end => {}
        }
    }
    drop(listener);
    let _ = timeout(FAREWELL, graceful.shutdown()).await;
    Ok(())
}

/// Never ends.
async fn accept(listener: &TcpListener, server: &Arc<Server>, graceful: &GracefulShutdown) {
    let routes = router(server.clone());
    let places = Arc::new(Semaphore::new(server.options.connections));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => connect(stream, place, server, routes.clone(), graceful),
            Err(e) => {
                // Too many open files, most likely: others must end first.
                tracing::warn!(error = %e, "a connection was not accepted");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn connect(
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    server: &Server,
    routes: axum::Router,
    graceful: &GracefulShutdown,
) {
    // Tokens are small and must not wait for each other.
    let _ = stream.set_nodelay(true);
    let stream = TokioIo::new(Patience::new(stream, server.options.write_timeout));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(server.options.read_timeout)
        .max_buf_size(BUFFER)
        .serve_connection(stream, TowerToHyperService::new(routes));
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        if let Err(e) = connection.await {
            tracing::debug!(error = %e, "a connection broke");
        }
        drop(place);
    });
}

/// Lets what is in flight end, and makes it end after a while.
async fn drain(server: &Server) {
    let deadline = Instant::now() + server.options.drain_timeout;
    server.phase.send_replace(Phase::Draining);
    let mut flights = server.flights.subscribe();
    tracing::info!(in_flight = *flights.borrow(), "no new requests; answers in flight go on");
    tokio::select! {
        _ = flights.wait_for(|n| *n == 0) => return,
        () = sleep_until(deadline) => {}
    }
    tracing::warn!(in_flight = *flights.borrow(), "answers in flight are cut");
    server.phase.send_replace(Phase::Cut);
    let _ = timeout(FAREWELL, flights.wait_for(|n| *n == 0)).await;
}
