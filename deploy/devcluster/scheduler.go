package main

import (
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
)

const schedulerName = "kube-scheduler"

func schedulerMain() int { return cli.Run(app.NewSchedulerCommand()) }

// schedulerArgs returns the flags of a single scheduler that serves no port.
func schedulerArgs(kubeconfig string) []string {
	return []string{
		"--kubeconfig=" + kubeconfig,
		"--leader-elect=false",
		"--secure-port=0",
	}
}
