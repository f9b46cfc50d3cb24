package main

import (
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
)

const schedulerName = "kube-scheduler"

func schedulerMain() int { return cli.Run(app.NewSchedulerCommand()) }

// schedulerArgs are the flags of a scheduler that is alone and serves no port.
func schedulerArgs(kubeconfig string) []string {
	return []string{
		"--kubeconfig=" + kubeconfig,
		"--leader-elect=false",
		"--secure-port=0",
	}
}
