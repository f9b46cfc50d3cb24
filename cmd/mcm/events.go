package main

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
)

// newEvents returns a recorder of Events in the control cluster, until stop is called.
//
// The manager's own recorder drops too much: after 25 Warnings about an object it lets
// one pass every five minutes, whatever its reason. A machine whose creates fail uses
// that up in two minutes, and Events that occur once would be lost. The newer Events
// API keeps only the first text of a reason for minutes.
func newEvents(mgr ctrl.Manager) (events record.EventRecorder, stop func(), err error) {
	client, err := corev1client.NewForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the control cluster for Events: %w", err)
	}
	broadcaster := record.NewBroadcasterWithCorrelatorOptions(record.CorrelatorOptions{SpamKeyFunc: spamKey})
	broadcaster.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: client.Events("")})
	log := mgr.GetLogger().WithName("events")
	broadcaster.StartEventWatcher(func(e *corev1.Event) {
		log.V(1).Info(e.Message, "type", e.Type, "object", e.InvolvedObject, "reason", e.Reason)
	})

	return broadcaster.NewRecorder(mgr.GetScheme(), corev1.EventSource{Component: "mcm"}), broadcaster.Shutdown, nil
}

// spamKey makes Events about one object with one reason share a limit.
func spamKey(e *corev1.Event) string {
	key, _ := record.EventAggregatorByReasonFunc(e)

	return key
}
